"""From the analysis to the document: the sections, their order, and the summary at the top."""

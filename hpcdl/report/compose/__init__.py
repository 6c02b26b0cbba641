"""From the analysis to the document: which sections, in which order, and the summary at the top."""

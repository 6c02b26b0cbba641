"""Checks of what a source holds, by subject: what is doubtful is asked about before anything is written."""

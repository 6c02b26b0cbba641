"""One file per command, or a few that belong together: parse, call one function below, render. No logic."""

"""One file per command: parse, call one function below, render. No logic."""

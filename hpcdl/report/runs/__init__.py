"""Inputs of a report: records, searches, published points."""

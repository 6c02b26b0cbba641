"""The inside of a step on every rank, on one clock: files of spans, their merge, and findings from them."""

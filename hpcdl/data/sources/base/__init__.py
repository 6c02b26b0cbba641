"""What every format uses: the interface of a source, splits, labels, and what names and values say."""

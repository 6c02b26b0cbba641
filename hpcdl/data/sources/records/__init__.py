"""Sources that hold a sample after another: TFRecord, tar files, prepared data sets."""

"""The source formats: one file each, found by name or recognised by their files."""

from __future__ import annotations

from hpcdl.core.registry import Entry, Registry

SOURCES = Registry(
    "source format",
    {
        "synthetic": Entry(target="hpcdl.data.sources.synthetic:SyntheticSource", summary="samples made from a seed"),
        "reader": Entry(
            target="hpcdl.data.sources.reader.source:ReaderSource",
            summary="what your own --reader FILE.py:NAME returns",
        ),
        "csv": Entry(target="hpcdl.data.sources.csv_list:CsvSource", summary="a CSV of file,label"),
        "table": Entry(target="hpcdl.data.sources.table:TableSource", summary="a CSV of columns of numbers and text"),
        "cifar10": Entry(target="hpcdl.data.sources.cifar:Cifar10Source", summary="CIFAR-10, binary or python version"),
        "cifar100": Entry(target="hpcdl.data.sources.cifar:Cifar100Source", summary="CIFAR-100, either version"),
        "mnist": Entry(target="hpcdl.data.sources.idx:IdxSource", summary="MNIST's IDX files, plain or .gz"),
        "numpy": Entry(target="hpcdl.data.sources.numpy_files:NumpySource", summary=".npy or .npz arrays"),
        "tfds": Entry(target="hpcdl.data.sources.tfds:TfdsSource", summary="what TensorFlow Datasets has prepared"),
        "tfrecord": Entry(target="hpcdl.data.sources.tfrecord:TFRecordSource", summary="TFRecord of tf.train.Example"),
        "hdf5": Entry(target="hpcdl.data.sources.hdf5_arrays:Hdf5Source", summary="arrays in HDF5 files"),
        "webdataset": Entry(
            target="hpcdl.data.sources.webdataset:WebDatasetSource", summary="WebDataset's .tar archives"
        ),
        "zip": Entry(
            target="hpcdl.data.sources.zip_images:ZipSource", summary="pictures in a .zip, a folder per class"
        ),
        "parquet": Entry(target="hpcdl.data.sources.parquet:ParquetSource", summary="Parquet files (needs pyarrow)"),
        "text": Entry(target="hpcdl.data.sources.text:TextSource", summary="lines or files of text with a class"),
        "memmap": Entry(target="hpcdl.data.sources.memmap:MemmapSource", summary="plain numbers of a type you state"),
        "image-folder": Entry(
            target="hpcdl.data.sources.image_folder:ImageFolderSource",
            summary="JPEG or PNG files, a folder per class",
        ),
    },
    group="hpcdl.sources",
)
"""In the order in which `auto` tries them; the most specific first, those of other packages last."""

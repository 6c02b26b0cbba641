"""COCO annotations (Pillow, which hpcdl has): which categories a picture shows; boxes are own["bbox"]."""

import json

import numpy as np
from PIL import Image


class Pictures:
    """A picture, and 1 for each category that it shows."""

    def __init__(self, source):
        self.source, coco = source, json.loads((source / "annotations.json").read_text())
        self.files = {own["id"]: own["file_name"] for own in coco["images"]}
        self.names = sorted(own["id"] for own in coco["categories"])
        self.pairs = {(own["image_id"], own["category_id"]) for own in coco["annotations"]}

    def items(self):
        """What `read` is called with."""
        return list(self.files)

    def read(self, number):
        """One sample."""
        picture = Image.open(self.source / "images" / self.files[number]).convert("RGB").resize((224, 224))
        shown = [(number, name) in self.pairs for name in self.names]
        return {"image": np.asarray(picture), "labels": np.array(shown, np.float32)}

"""Reports TensorFlow's build and the number of GPUs it sees, as JSON: `python -m hpcdl.supervision.devices_seen`.

This is a separate process, because TensorFlow claims the devices it finds.
"""

from __future__ import annotations

import json

import tensorflow as tf


def main() -> None:
    """Print one line."""
    built = tf.sysconfig.get_build_info()
    built_for = f"CUDA {built.get('cuda_version', '')}".strip() if built.get("is_cuda_build") else ""
    if built.get("is_rocm_build"):
        built_for = "ROCm"
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    print(json.dumps({"version": tf.__version__, "built_for": built_for, "seen": num_gpus}))


if __name__ == "__main__":
    main()

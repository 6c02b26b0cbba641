"""Names of Horovod, TensorFlow 1 and Keras 2 that no longer exist, and their replacements.

Names are full names: `hvd` stands for Horovod's modules and for hpcdl, `keras` for keras and for tensorflow.keras.
"""

from __future__ import annotations

# The longest first: names are compared with their beginnings in this order.
MODULES = ("horovod.tensorflow.keras", "horovod.tensorflow", "horovod.keras")
"""Modules of Horovod that hpcdl replaces."""
_KERAS_ALONE = "hpcdl trains Keras models on TensorFlow alone"
REFUSED = {
    "horovod.torch": f"stay with PyTorch's own torch.distributed: {_KERAS_ALONE}",
    "horovod.mxnet": f"rewrite the model with Keras: {_KERAS_ALONE}",
    "horovod.spark": "write the data with `hpcdl shard` and start ranks with `hpcdl run`: hpcdl has no estimators",
    "horovod.ray": "start ranks with `hpcdl run`: hpcdl does not start them by Ray",
    "horovod.runner": "leave it out; start ranks with `hpcdl run --ranks N SCRIPT`",
    "horovod.run": "leave it out; start ranks with `hpcdl run --ranks N SCRIPT`",
    "horovod": "leave it out; start ranks with `hpcdl run --ranks N SCRIPT`",
}
"""Modules of Horovod without a counterpart. The longest matching name counts."""
NOT_MOVED = ("horovod.torch", "horovod.mxnet", "horovod.spark", "horovod.ray")

_BUILT = "leave it out: hpcdl always exchanges over MPI (`hpcdl doctor` says which)"
_IN_CALLBACKS = "leave it out: fit with a distributed optimizer does that"
_BY_STATE = "hvd.callbacks(state)"
HOROVOD = {
    "hvd.Adasum": "hvd.Average: hpcdl has no Adasum",
    "hvd.Compression.none": '"none"',
    "hvd.Compression.fp16": '"fp16"',
    "hvd.Compression": 'compress="none", "fp16" or "bf16"',
    "hvd.DistributedAdasumOptimizer": "hvd.DistributedOptimizer(optimizer): hpcdl has no Adasum",
    "hvd.PartialDistributedOptimizer": "hvd.DistributedOptimizer(optimizer): it combines all gradients",
    "hvd.PartialDistributedGradientTape": "hvd.DistributedGradientTape(tape): it combines all gradients",
    "hvd.SyncBatchNormalization": "keras.layers.BatchNormalization(synchronized=True)",
    "hvd.BroadcastGlobalVariablesHook": "hvd.broadcast_variables(model.variables)",
    "hvd.broadcast_global_variables": "hvd.broadcast_variables(model.variables)",
    "hvd.broadcast_object_fn": "hvd.broadcast_object(value)",
    "hvd.callbacks.BroadcastGlobalVariablesCallback": _IN_CALLBACKS,
    "hvd.callbacks.MetricAverageCallback": _IN_CALLBACKS,
    "hvd.callbacks.BestModelCheckpoint": "keras.callbacks.ModelCheckpoint(path, save_best_only=True)",
    "hvd.cross_rank": "hvd.node_rank",
    "hvd.cross_size": "hvd.size() // hvd.local_size()",
    "hvd.is_homogeneous": "hvd.size() % hvd.local_size() == 0",
    "hvd.add_process_set": "hvd.ProcessSet([0, 1])",
    "hvd.remove_process_set": "leave it out",
    "hvd.global_process_set": "leave it out: all ranks are meant without a process set",
    "hvd.start_timeline": "leave it out; `hpcdl run --trace steps SCRIPT`",
    "hvd.stop_timeline": "leave it out; `hpcdl run --trace steps SCRIPT`",
    "hvd.rank_op": "hvd.rank",
    "hvd.local_rank_op": "hvd.local_rank",
    "hvd.size_op": "hvd.size",
    "hvd.local_size_op": "hvd.local_size",
    "hvd.check_num_rank_power_of_2": "leave it out",
    "hvd.run": REFUSED["horovod.run"],
    "hvd.elastic.run": "leave it out, and call the function: `hpcdl run --elastic` continues with new ranks by itself",
    "hvd.elastic.CommitStateCallback": _BY_STATE,
    "hvd.elastic.UpdateBatchStateCallback": (
        "leave it out: state.batch stays what it was, and an epoch that was cut off begins again with the saved weights"
    ),
    "hvd.elastic.UpdateEpochStateCallback": f"leave it out: {_BY_STATE} does that",
    "hvd.elastic.KerasState": "hvd.State",
    "hvd.elastic.TensorFlowKerasState": "hvd.State",
    "hvd.elastic.TensorFlowState": "hvd.State(model): it takes models, not variables",
    "hvd.elastic.ObjectState": "hvd.State(model, name=value)",
    "hvd.elastic": "hvd.State(model), with `hpcdl run --elastic`",
    **{
        f"hvd.{name}": _BUILT
        for name in (
            *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
            *("ddl_built", "ccl_built", "cuda_built", "rocm_built"),
        )
    },
}
"""Names of Horovod that hpcdl lacks. The longest matching name counts."""
WARM_UP = "hvd.callbacks.LearningRateWarmupCallback"
SCHEDULE = "hvd.callbacks.LearningRateScheduleCallback"
STATES = ("hvd.elastic.KerasState", "hvd.elastic.TensorFlowKerasState")
STATE_METHODS = {
    "register_reset_callbacks": "leave it out: the script starts again where the ranks change, and hvd.size() with it",
    "on_reset": "leave it out: the script starts again where the ranks change",
    "sync": "leave it out: hvd.State begins alike on all ranks",
    "check_host_updates": "leave it out: state.commit() looks for that",
}
"""Members of Horovod's elastic states other than `commit`, `save` and `restore`."""
ARGUMENTS = {
    ("hvd.DistributedOptimizer", "compression"): "compress=",
    ("hvd.DistributedGradientTape", "compression"): "compress=",
    ("hvd.load_model", "compression"): "compress=",
    ("hvd.DistributedOptimizer", "num_groups"): "groups=, or leave it out where it is 0",
    ("hvd.DistributedGradientTape", "num_groups"): "groups=, or leave it out where it is 0",
    ("hvd.load_model", "custom_optimizers"): "leave it out, and name them in custom_objects=",
}
"""Arguments of Horovod's functions that have another name in hpcdl."""

_SESSION = "leave it out: TensorFlow 2 has no sessions, and hvd.init() sees to the GPU"
_EAGER = "leave it out: Keras 3 compiles fit by itself, and needs eager execution"
REMOVED = {
    "tensorflow.ConfigProto": _SESSION,
    "tensorflow.GPUOptions": _SESSION,
    "tensorflow.Session": _SESSION,
    "tensorflow.InteractiveSession": _SESSION,
    "keras.backend.set_session": _SESSION,
    "keras.backend.get_session": _SESSION,
    "tensorflow.enable_eager_execution": _EAGER,
    "tensorflow.disable_eager_execution": _EAGER,
    "tensorflow.disable_v2_behavior": _EAGER,
    "tensorflow.enable_v2_behavior": _EAGER,
    "tensorflow.global_variables_initializer": "leave it out: variables are initialized where they are made",
    "tensorflow.placeholder": "keras.Input",
    "tensorflow.get_default_graph": "leave it out",
    "tensorflow.train.MonitoredTrainingSession": "a loop over the data set, or model.fit",
    "tensorflow.train.get_or_create_global_step": "optimizer.iterations",
    "tensorflow.train.StopAtStepHook": "the steps of the loop, or steps_per_epoch= of model.fit",
    "tensorflow.train.LoggingTensorHook": "print, on rank 0",
    "tensorflow.train.GradientDescentOptimizer": "keras.optimizers.SGD",
    "tensorflow.train.MomentumOptimizer": "keras.optimizers.SGD(rate, momentum=0.9)",
    "tensorflow.train.AdamOptimizer": "keras.optimizers.Adam",
    "tensorflow.train.AdagradOptimizer": "keras.optimizers.Adagrad",
    "tensorflow.train.RMSPropOptimizer": "keras.optimizers.RMSprop",
    "tensorflow.train.experimental.enable_mixed_precision_graph_rewrite": (
        'keras.mixed_precision.set_global_policy("mixed_float16") before the model is made'
    ),
    "tensorflow.estimator": "keras.Model with fit: estimators are gone from TensorFlow",
    "tensorflow.contrib": "Keras's own: tf.contrib is gone from TensorFlow",
    "tensorflow.layers": "keras.layers",
    "tensorflow.logging": "logging, of Python",
    "tensorflow.app": "argparse, of Python",
    "tensorflow.flags": "argparse, of Python",
    "tensorflow.gfile": "tf.io.gfile",
    "tensorflow.set_random_seed": "keras.utils.set_random_seed",
    "tensorflow.random_uniform": "tf.random.uniform",
    "tensorflow.random_normal": "tf.random.normal",
    "tensorflow.python.keras": "keras: what is in tensorflow.python is not Keras 3",
    "tf_keras": "keras: hpcdl trains with Keras 3",
    "keras.optimizers.legacy": "keras.optimizers",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.experimental": "keras",
    "keras.mixed_precision.experimental": "keras.mixed_precision",
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.layers.experimental.SyncBatchNormalization": "keras.layers.BatchNormalization(synchronized=True)",
    "keras.layers.experimental": "keras.layers",
    "keras.layers.CuDNNLSTM": "keras.layers.LSTM",
    "keras.layers.CuDNNGRU": "keras.layers.GRU",
    "keras.layers.ThresholdedReLU": "keras.layers.ReLU(threshold=theta)",
    "keras.layers.LocallyConnected1D": "keras.layers.Conv1D: Keras 3 has no locally connected layers",
    "keras.layers.LocallyConnected2D": "keras.layers.Conv2D: Keras 3 has no locally connected layers",
    "keras.utils.multi_gpu_model": "leave it out: each rank has a GPU",
    "keras.utils.np_utils": "keras.utils",
    "keras.engine": "keras",
    **{
        f"keras.layers.{name}": "keras.layers"
        for name in ("core", "convolutional", "pooling", "normalization", "merge", "recurrent", "embeddings")
    },
}
"""Names of TensorFlow 1 and Keras 2. The longest matching name counts."""
BACKEND = "keras.backend"
LEFT_IN_BACKEND = (
    *("backend", "clear_session", "epsilon", "floatx", "get_uid", "image_data_format", "is_float_dtype"),
    *("is_int_dtype", "is_keras_tensor", "result_type", "set_epsilon", "set_floatx", "set_image_data_format"),
    "standardize_dtype",
)
"""Members that keras.backend still has. tensorflow.keras.backend has the others too, except sessions."""
STILL_IN_TF_KERAS = {
    "keras.preprocessing.image.ImageDataGenerator": "tf.keras.preprocessing.image.ImageDataGenerator",
    "keras.preprocessing.text": "keras.layers.TextVectorization",
    "keras.preprocessing.sequence": "keras.utils.pad_sequences",
}
"""Names that `keras` has lost and `tensorflow.keras` still has."""
LEFT_IN_VERSION_1 = ("logging", "app", "flags", "gfile", "set_random_seed", "random_uniform", "random_normal", "random")
"""Names of tf.compat.v1 that still work."""
VERSION_1 = "a TensorFlow 1 name: what it does is Keras's own, or tf's without compat.v1"

OPTIMIZER_ARGUMENTS = {
    "lr": "learning_rate=",
    "decay": "learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay): Keras 3 passes over decay=",
    "schedule_decay": "leave it out",
}
OPTIMIZER_MEMBERS = {
    "lr": "learning_rate",
    "weights": "variables",
    "get_weights": "[one.numpy() for one in optimizer.variables]",
    "set_weights": "variable.assign(value), for each of optimizer.variables; or hvd.State(model)",
    "get_gradients": "tf.GradientTape, and optimizer.apply_gradients",
    "get_updates": "tf.GradientTape, and optimizer.apply_gradients",
    "minimize": "tf.GradientTape, and optimizer.apply_gradients",
    "get_scaled_loss": "scale_loss",
    "get_unscaled_gradients": "leave it out: apply_gradients does that",
    "_distribute": "leave it out",
}
"""Members of optimizers. Their `variables` is no longer a function."""
METHODS = {
    "fit_generator": "fit",
    "evaluate_generator": "evaluate",
    "predict_generator": "predict",
    "predict_classes": "predict(...).argmax(-1)",
    "predict_proba": "predict",
}
_GONE = "leave it out: Keras 3 has no such argument"
_WORKERS = dict.fromkeys(("workers", "use_multiprocessing", "max_queue_size"), _GONE)
METHOD_ARGUMENTS = {
    "compile": dict.fromkeys(("experimental_run_tf_function", "sample_weight_mode", "target_tensors"), _GONE),
    **dict.fromkeys(
        (*("fit", "evaluate", "predict"), *("fit_generator", "evaluate_generator", "predict_generator")), _WORKERS
    ),
    "save": {"save_format": 'leave it out, and end the name in ".keras"'},
    "save_weights": {"save_format": 'leave it out, and end the name in ".weights.h5"'},
}
CALLBACK_ARGUMENTS = {
    "keras.callbacks.ModelCheckpoint": {"period": "save_freq="},
    "keras.callbacks.TensorBoard": dict.fromkeys(("write_grads", "batch_size"), _GONE),
    "keras.callbacks.ReduceLROnPlateau": {"epsilon": "min_delta="},
}
LAYER_ARGUMENTS = {"batch_input_shape": "batch_shape= of keras.Input, before the layer"}
PINNING = ("tensorflow.config.set_visible_devices", "tensorflow.config.experimental.set_visible_devices")
NO_PINNING = "leave it out: hvd.init() shows each rank its own GPU"
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": NO_PINNING,
    "TF_USE_LEGACY_KERAS": "leave it out: hpcdl trains with Keras 3",
    "HOROVOD_TIMELINE": "leave it out; `hpcdl run --trace steps SCRIPT`",
}
"""Environment variables that a script sets."""

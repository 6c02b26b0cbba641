"""The strategy `ps`: some ranks average gradients for all others."""

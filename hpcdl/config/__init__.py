"""Settings: what there is (schema), and where each value comes from (load)."""

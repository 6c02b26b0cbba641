"""Schedulers and launchers: detection of the environment, and execution of a LaunchPlan; one file per launcher."""

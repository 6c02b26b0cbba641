"""Where am I, and how do ranks start: one file per scheduler or launcher; carries a LaunchPlan out."""

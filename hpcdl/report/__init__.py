"""From records to a report: records -> tables -> figures -> renderers. Everything before the renderers is pure."""

"""From records to a report: records -> tables -> figures -> renderers; everything before the renderers is pure."""

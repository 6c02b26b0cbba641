"""What a report is before it is drawn: sections, tables, cells."""

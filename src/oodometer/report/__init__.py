"""Figures, the report page and tables for papers, from the results of a study."""

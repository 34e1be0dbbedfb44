"""Files of any origin: JSON values, Parquet tables, growing files, and checks of untrusted files."""

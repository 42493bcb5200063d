"""The audit: rules on the files, names and figures of result folders."""

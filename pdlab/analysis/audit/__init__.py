"""What is wrong with result folders: rules on their files, names and figures."""

"""Files of the data folder: their contents, the database that they belong to, and the removal of unneeded ones."""

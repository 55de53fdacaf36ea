"""Files of the data folder: contents, the database that they belong to, and removal of what is not needed."""

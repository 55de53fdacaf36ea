"""The page of one or several reports: what it reads, what it draws, and how it is put together."""

"""The pictures of the documents, and the output of their examples: made by `python docs/pictures/draw.py`."""

"""What the pictures show, and what the document prints: the real batchers, run in virtual time. Needs no matplotlib."""

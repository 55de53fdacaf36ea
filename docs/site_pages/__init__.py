"""What `mkdocs.yml` adds to the written pages: references made from the code, and pages that lie outside `docs/`."""

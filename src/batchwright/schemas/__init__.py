"""JSON Schemas in the form that the grammar compiler needs: everything they say is enforced, or they are refused."""

from batchwright.schemas.keeping import UnkeptSchema, kept, says_nothing

__all__ = ["UnkeptSchema", "kept", "says_nothing"]

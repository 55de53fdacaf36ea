"""JSON Schemas as the compiler of grammars has to be given them: what they say is kept to, or they are refused."""

from batchwright.schemas.keeping import UnkeptSchema, kept, says_nothing

__all__ = ["UnkeptSchema", "kept", "says_nothing"]

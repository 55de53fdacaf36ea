"""Whether a database and a folder of files belong together: every case of what both say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchwright.service.files.pairing import NO_MARK, DatabaseState, FolderState, relation
from batchwright.store.records import StoreIdentity

ids = st.sampled_from(["a", "b"])
marks = st.sampled_from(["1", "2", NO_MARK])
identities = st.none() | st.builds(StoreIdentity, ids, marks, st.none() | marks)
folders = st.builds(FolderState, st.none() | ids, st.none() | marks, st.booleans())
databases = st.builds(DatabaseState, identities, st.booleans(), st.booleans())


@given(folders, databases)
def test_a_database_is_taken_only_for_its_own_files(folder: FolderState, database: DatabaseState) -> None:
    found = relation(folder, database)
    identity = database.identity
    same = identity is not None and identity.store_id == folder.store_id
    assert same == (found in ("current", "estranged"))
    if found == "current":
        assert identity is not None
        assert folder.mark in (identity.mark, identity.next_mark)
    if same:
        return
    # Two different ids are never reconciled, whatever else the database knows.
    assert (found == "foreign") == (folder.store_id is not None and identity is not None)
    if found == "foreign":
        return
    if folder.has_files:
        assert found == ("known" if database.knows_files else "strange")
    elif database.names_files:
        assert found == "missing"
    else:
        # Only what was never used is taken for new.
        paired = identity is not None and identity.mark != NO_MARK
        assert found == ("taken" if folder.store_id is not None else "elsewhere" if paired else "new")

-- Applied to files without the table value. Small values (stores/values.py); times are microseconds since 1970.

CREATE TABLE value (
    collection TEXT    NOT NULL,  -- Collection.identity
    name       TEXT    NOT NULL,
    data       BLOB    NOT NULL,
    written    INTEGER NOT NULL,
    ends       INTEGER NOT NULL,
    PRIMARY KEY (collection, name)
) WITHOUT ROWID;

CREATE INDEX value_ends ON value (ends);

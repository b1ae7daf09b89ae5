-- One row per policy and key holds the states of all its limits; long logs have rows of their own.
-- Times are microseconds since 1970.

CREATE TABLE state (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    policy  TEXT    NOT NULL,
    key     TEXT    NOT NULL,
    limits  TEXT    NOT NULL,  -- JSON: of each limit that wrote a state, what it was (see rows.py)
    numbers TEXT    NOT NULL,  -- JSON: the integers of each state, in the same order; [] where there is none
    updated INTEGER NOT NULL,
    due     INTEGER NOT NULL,  -- when to look whether the row can go; it may live longer, but not end before
    UNIQUE (policy, key)
);

CREATE INDEX state_due ON state (due);

CREATE TABLE log (
    id    INTEGER PRIMARY KEY AUTOINCREMENT,
    state INTEGER              -- the row it belongs to; NULL: ended, its entries are to be removed
);

CREATE INDEX log_state ON log (state);

CREATE TABLE entry (
    log       INTEGER NOT NULL,
    seq       INTEGER NOT NULL,
    time      INTEGER NOT NULL,
    sum       INTEGER NOT NULL,  -- of the costs up to here: rises with seq, so that both can be bisected
    cost      INTEGER NOT NULL,
    task_type TEXT,
    task_id   TEXT,
    PRIMARY KEY (log, seq)
) WITHOUT ROWID;

-- A file of schema 3, as tidegate wrote it when every SQLite file had the tables of budgets: three completed tasks of a
-- budget, and the key 'k' of another policy with 2 of 5 permits used.
PRAGMA application_id = 0x74696465;
PRAGMA user_version = 3;
BEGIN TRANSACTION;
CREATE TABLE budget_completion (
    id        INTEGER PRIMARY KEY,
    policy    TEXT    NOT NULL,
    completed INTEGER NOT NULL,
    tasks     INTEGER NOT NULL,  -- how many, where they have no names of their own
    task_type TEXT,
    task_id   TEXT,
    cost      TEXT               -- JSON: what the whole batch cost, by unit, with its first row
);
INSERT INTO "budget_completion" VALUES(1,'budget:tasks',1750000000000000,1,NULL,'a',NULL);
INSERT INTO "budget_completion" VALUES(2,'budget:tasks',1750000000000000,1,NULL,'b',NULL);
INSERT INTO "budget_completion" VALUES(3,'budget:tasks',1750000000000000,1,NULL,NULL,NULL);
CREATE TABLE budget_open (
    owner   INTEGER NOT NULL,  -- who reserved: a random number for each budget that a program opens
    at      INTEGER NOT NULL,  -- when: the instant of the charge, in microseconds
    number  INTEGER NOT NULL,  -- of those of the same instant
    policy  TEXT    NOT NULL,
    expires INTEGER NOT NULL,  -- not settled by then, it is given back
    costs   TEXT    NOT NULL,  -- JSON: what is still open, by the name of each limit
    PRIMARY KEY (owner, at, number)
) WITHOUT ROWID;
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
CREATE TABLE log (
    id    INTEGER PRIMARY KEY AUTOINCREMENT,
    state INTEGER              -- the row it belongs to; NULL: ended, its entries are to be removed
);
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
INSERT INTO "state" VALUES(1,'budget:tasks','tasks','[["minute","sliding_log",9007199254740991,60000000,"tasks",9007199254740991,"1m","UTC",1,0],["day","sliding_log",9007199254740991,86400000000,"tasks",9007199254740991,"1d","UTC",1,0]]','[[1750000000000000, 2, 1750000000000000, 1], [1750000000000000, 2, 1750000000000000, 1]]',1750000000000000,1750087503970304);
INSERT INTO "state" VALUES(2,'default','k','[["1h","sliding_log",5,3600000000,"requests",5,"1h","UTC",1,0]]','[[1750000000000000, 2]]',1750000000000000,1750003617890304);
CREATE INDEX state_due ON state (due);
CREATE INDEX log_state ON log (state);
CREATE VIEW tidegate_parts AS
SELECT state.id AS state, policy, state.key AS key, updated,
       part.key AS place,
       json_extract(part.value, '$[0]') AS name,
       json_extract(part.value, '$[1]') AS algorithm,
       json_extract(part.value, '$[2]') AS quota,
       json_extract(part.value, '$[3]') AS length,
       json_extract(part.value, '$[4]') AS unit,
       json_extract(part.value, '$[5]') AS burst,
       json_extract(part.value, '$[6]') AS period,
       json_extract(numbers, '$[' || part.key || ']') AS n
FROM state, json_each(state.limits) AS part
WHERE json_extract(numbers, '$[' || part.key || '][0]') IS NOT NULL;
CREATE VIEW tidegate_windows AS
SELECT *,
       CASE algorithm
         WHEN 'token_bucket' THEN  -- what is missing, rounded up: burst - remaining
           (burst * json_extract(n, '$[2]') - json_extract(n, '$[0]') + json_extract(n, '$[2]') - 1) / json_extract(n, '$[2]')
         WHEN 'sliding_window' THEN
           json_extract(n, '$[0]') + CAST(ceiled AS INTEGER) + (ceiled > CAST(ceiled AS INTEGER))
         WHEN 'fixed_window' THEN json_extract(n, '$[0]')
         WHEN 'calendar_window' THEN json_extract(n, '$[0]')
         ELSE CASE json_type(n, '$[0]')
           WHEN 'array' THEN json_extract(n, '$[0][6]') - json_extract(n, '$[0][4]')
           ELSE (SELECT SUM(value) FROM json_each(n) WHERE key % 2 = 1) END
       END AS used,
       CASE algorithm
         WHEN 'token_bucket' THEN json_extract(n, '$[1]')
         WHEN 'sliding_window' THEN json_extract(n, '$[2]')
         WHEN 'fixed_window' THEN json_extract(n, '$[1]')
         WHEN 'calendar_window' THEN json_extract(n, '$[1]')
         ELSE updated - length
       END AS opened,
       CASE algorithm
         WHEN 'token_bucket' THEN json_extract(n, '$[1]')
           + CAST((burst - 1.0 * json_extract(n, '$[0]') / json_extract(n, '$[2]')) * length / quota AS INTEGER)
         WHEN 'sliding_window' THEN json_extract(n, '$[2]') + length
         WHEN 'fixed_window' THEN json_extract(n, '$[1]') + length
         WHEN 'calendar_window' THEN json_extract(n, '$[2]')
         ELSE updated
       END AS closes
FROM (
    SELECT *, CASE algorithm WHEN 'sliding_window' THEN
        1.0 * json_extract(n, '$[1]') * max(0, json_extract(n, '$[2]') + length - updated) / length END AS ceiled
    FROM tidegate_parts
);
CREATE VIEW tidegate_states AS
SELECT policy, key, name, algorithm, unit, quota, period, used,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS updated_at
FROM tidegate_windows;
CREATE VIEW rate_limiter_state AS
SELECT key AS domain, used AS request_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS updated_at
FROM (SELECT *, min(place) FROM tidegate_windows GROUP BY state);
CREATE INDEX budget_open_expires ON budget_open (policy, expires);
CREATE INDEX budget_completion_completed ON budget_completion (completed);
CREATE VIEW rate_limits AS
SELECT CASE WHEN policy GLOB 'budget:*' THEN name
            ELSE CASE period WHEN '1m' THEN 'minute' WHEN '1h' THEN 'hour' WHEN '1d' THEN 'day' WHEN '1w' THEN 'week'
                             WHEN '30d' THEN 'month' ELSE period END END AS time_period,
       used AS current_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS last_updated
FROM tidegate_windows
WHERE NOT (policy GLOB 'budget:*' AND instr(name, '<'));
CREATE VIEW task_completions AS
WITH RECURSIVE longest AS (
    SELECT state, n, max(length) FROM tidegate_parts
    WHERE algorithm = 'sliding_log' AND NOT policy GLOB 'budget:*' GROUP BY state
), admitted (time, cost, task_type, task_id) AS (
    SELECT entry.time, entry.cost, entry.task_type, entry.task_id
    FROM longest JOIN entry ON entry.log = json_extract(n, '$[0][0]')
                           AND entry.seq >= json_extract(n, '$[0][2]') AND entry.seq < json_extract(n, '$[0][3]')
    WHERE json_type(n, '$[0]') = 'array'
    UNION ALL
    SELECT json_extract(n, '$[' || number.key || ']'), json_extract(n, '$[' || (number.key + 1) || ']'), NULL, NULL
    FROM longest, json_each(n) AS number
    WHERE json_type(n, '$[0]') = 'integer' AND number.key % 2 = 0
    UNION ALL
    SELECT completed, tasks, task_type, task_id FROM budget_completion
), task (time, cost, task_type, task_id, number) AS (
    SELECT time, cost, task_type, task_id, 1 FROM admitted
    UNION ALL
    SELECT time, cost, task_type, task_id, number + 1 FROM task WHERE number < cost
)
SELECT row_number() OVER (ORDER BY time) AS id,
       strftime('%Y-%m-%d %H:%M:%S', time / 1000000, 'unixepoch') || printf('.%06dZ', time % 1000000) AS completed_at,
       task_type, task_id
FROM task;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('state',2);
COMMIT;

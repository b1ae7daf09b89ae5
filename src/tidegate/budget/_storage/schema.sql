-- Completed tasks of budgets (`tidegate.budget`), whose policies are named budget:…. The store of a budget applies this
-- to a file without this table.

CREATE TABLE budget_completion (
    id        INTEGER PRIMARY KEY,
    policy    TEXT    NOT NULL,
    completed INTEGER NOT NULL,
    tasks     INTEGER NOT NULL,  -- more than 1 only if the tasks have no IDs
    task_type TEXT,
    task_id   TEXT,
    cost      TEXT               -- JSON: the cost of the whole batch by unit, in its first row
);

CREATE INDEX budget_completion_completed ON budget_completion (completed);

-- The tiers of each budget, also those without a state; limits that reserve a share are not shown.
CREATE VIEW tidegate_budget_tiers AS
SELECT state.id AS state, substr(policy, length('budget:') + 1) AS budget, part.key AS place,
       json_extract(part.value, '$[0]') AS name, updated
FROM state, json_each(state.limits) AS part
WHERE policy GLOB 'budget:*' AND NOT instr(json_extract(part.value, '$[0]'), '<');

-- One row per tier of each budget, also if the budget is idle, and one per limit of each key of other policies,
-- without those that tidegate uses itself.
DROP VIEW rate_limits;
CREATE VIEW rate_limits AS
SELECT time_period, current_count,
       strftime('%Y-%m-%d %H:%M:%S', opened / 1000000, 'unixepoch') || printf('.%06dZ', opened % 1000000) AS window_start,
       strftime('%Y-%m-%d %H:%M:%S', closes / 1000000, 'unixepoch') || printf('.%06dZ', closes % 1000000) AS window_end,
       strftime('%Y-%m-%d %H:%M:%S', updated / 1000000, 'unixepoch') || printf('.%06dZ', updated % 1000000) AS last_updated,
       budget
FROM (
    SELECT tier.name AS time_period, coalesce(used, 0) AS current_count, coalesce(opened, tier.updated) AS opened,
           coalesce(closes, tier.updated) AS closes, tier.updated, budget
    FROM tidegate_budget_tiers AS tier
    LEFT JOIN tidegate_windows AS counted ON counted.state = tier.state AND counted.place = tier.place
    UNION ALL
    SELECT CASE period WHEN '1m' THEN 'minute' WHEN '1h' THEN 'hour' WHEN '1d' THEN 'day' WHEN '1w' THEN 'week'
                       WHEN '30d' THEN 'month' ELSE period END,
           used, opened, closes, updated, NULL
    FROM tidegate_windows WHERE policy NOT GLOB 'budget:*' AND policy NOT GLOB 'tidegate.*'  -- such as the audit log
);

-- One row per task that a budget recorded; for other policies, one per permit in the longest log of each key.
DROP VIEW task_completions;
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

-- Applied to files without the view tidegate_budget_tiers. Of the same version as 0003_budgets.sql, whose view rate_limits
-- it replaces.

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

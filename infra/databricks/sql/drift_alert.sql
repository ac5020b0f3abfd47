-- How many sets of images were found to drift in the last hours. Always one row: the alert fires where drifted > 0.
-- :drift  the table `drift` of watch.out
-- :hours  how far back; a little more than the time between two checks
WITH told AS (
  SELECT from_json(to_json(struct(*)), 'key STRING, name STRING, model STRING, table STRING, checked_at STRING,
    is_drift BOOLEAN, window BIGINT, about STRING') AS r
  FROM IDENTIFIER(:drift)
),
ordered AS (
  -- As in drift.sql: the later check of the same images counts, so a check that is made again with a calm
  -- result ends the alarm.
  SELECT r.name, r.model, r.is_drift, try_cast(r.checked_at AS TIMESTAMP) AS at,
    row_number() OVER (
      PARTITION BY r.name, r.model, CASE
        WHEN r.about <> '' THEN r.about
        WHEN r.window <> 0 THEN concat(regexp_extract(r.table, '^(.*)@v', 1), ' window ', r.window)
        ELSE r.table
      END
      ORDER BY try_cast(r.checked_at AS TIMESTAMP) DESC, r.key
    ) AS place
  FROM told
),
-- A time that has not come yet is a wrong clock's: the check counts as new.
newest AS (
  SELECT *, at >= current_timestamp() - make_dt_interval(0, CAST(:hours AS INT)) AS is_new FROM ordered WHERE place = 1
)
SELECT
  count_if(is_new AND is_drift) AS drifted,
  coalesce(array_join(array_sort(collect_set(if(is_new AND is_drift, concat(name, ' of ', model), NULL))), ', '), '') AS what,
  count_if(is_new) AS checks,
  max(at) AS newest_check
FROM newest

-- The tests behind the newest check of each model and batch, the smallest p-value first.
-- :drift  the table `drift` of watch.out
WITH ordered AS (
  SELECT key, name, model, evidence, try_cast(checked_at AS TIMESTAMP) AS at,
    row_number() OVER (PARTITION BY name, model ORDER BY try_cast(checked_at AS TIMESTAMP) DESC, key) AS place
  FROM IDENTIFIER(:drift)
),
tests AS (
  SELECT key, name, model, at,
    explode(from_json(evidence, 'ARRAY<STRUCT<detector: STRING, `on`: STRING, statistic: DOUBLE, p_value: DOUBLE,
      threshold: DOUBLE, is_drift: BOOLEAN, engine: STRING, detail: STRING>>')) AS test
  FROM ordered
  WHERE place = 1
)
SELECT at AS checked_at, name, model, test.detector, test.`on` AS looks_at, test.statistic, test.p_value,
  test.threshold, test.is_drift, test.engine, test.detail, key
FROM tests
ORDER BY name, model, p_value, detector, looks_at

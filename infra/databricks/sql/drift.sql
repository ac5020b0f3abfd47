-- Drift checks, newest first: one row for each set of images that a model was checked on.
-- :drift  the table `drift` of watch.out
WITH told AS (
  -- The table of an older raypipe lacks columns. Read through JSON they are null.
  SELECT from_json(to_json(struct(*)), 'key STRING, name STRING, model STRING, table STRING, checked_at STRING,
    engine STRING, is_drift BOOLEAN, p_value DOUBLE, alpha DOUBLE, reference_images BIGINT, batch_images BIGINT,
    window BIGINT, about STRING, accuracy DOUBLE, accuracy_low DOUBLE, accuracy_high DOUBLE, accuracy_known DOUBLE,
    no_estimate STRING, labelled BIGINT, measured_as STRING, measured DOUBLE, measured_low DOUBLE,
    measured_high DOUBLE') AS r
  FROM IDENTIFIER(:drift)
),
checks AS (
  SELECT r.*,
    -- A text that is no time becomes null: one bad row must not hide all others.
    try_cast(r.checked_at AS TIMESTAMP) AS at,
    -- What was looked at, as raypipe/watch/records.py `looked_at` says it.
    CASE
      WHEN r.about <> '' THEN r.about
      WHEN r.window <> 0 THEN concat(regexp_extract(r.table, '^(.*)@v', 1), ' window ', r.window)
      ELSE r.table
    END AS looked_at,
    -- Four shares, or nothing is known.
    r.accuracy BETWEEN 0 AND 1 AND r.accuracy_low BETWEEN 0 AND 1 AND r.accuracy_high BETWEEN 0 AND 1
      AND r.accuracy_known BETWEEN 0 AND 1 AS has_estimate,
    -- As raypipe/watch/feedback.py `of_row` reads it. NaN is above every number here.
    r.labelled > 0 AND NOT (r.measured_as <=> 'mean absolute error') AND r.measured BETWEEN 0 AND 1 AS has_accuracy,
    r.labelled > 0 AND r.measured_as = 'mean absolute error' AND r.measured >= 0 AND r.measured < double('infinity') AS has_error
  FROM told
),
ordered AS (
  -- Of two checks of the same images, as with other settings, the later one counts.
  SELECT *, row_number() OVER (PARTITION BY name, model, looked_at ORDER BY at DESC, key) AS place
  FROM checks
)
SELECT
  at AS checked_at,
  name,
  model,
  table AS checked_table,
  window AS window_number,
  batch_images,
  reference_images,
  p_value,
  alpha,
  coalesce(is_drift, FALSE) AS is_drift,
  if(coalesce(is_drift, FALSE), 'drift', 'no drift') AS verdict,
  if(has_estimate, accuracy, NULL) AS accuracy,
  if(has_estimate, accuracy_low, NULL) AS accuracy_low,
  if(has_estimate, accuracy_high, NULL) AS accuracy_high,
  if(has_estimate, accuracy_known, NULL) AS accuracy_known,
  if(has_estimate, accuracy_known - accuracy, NULL) AS loss,
  if(has_estimate, NULL, coalesce(nullif(no_estimate, ''), 'the check was made by an older raypipe')) AS no_estimate,
  -- Of labels that came later: the share that is right, or with a number to predict the mean absolute error.
  if(has_accuracy OR has_error, labelled, NULL) AS labelled,
  if(has_accuracy, measured, NULL) AS measured_accuracy,
  if(has_accuracy AND measured_low BETWEEN 0 AND 1, measured_low, NULL) AS measured_low,
  if(has_accuracy AND measured_high BETWEEN 0 AND 1, measured_high, NULL) AS measured_high,
  if(has_error, measured, NULL) AS measured_error,
  engine,
  key
FROM ordered
WHERE place = 1
ORDER BY checked_at DESC, key

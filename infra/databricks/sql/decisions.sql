-- Champion against challenger, newest first: one row for each slice of the test images, and one for all of them (slice all).
-- A result is the share of images that a model has right; with a unit, its mean absolute error.
-- passed_gate: what the gate decided. Whether the alias moved is in the table of moves (raypipe promote CONFIG --history).
-- :decisions  the table `decisions` of watch.out
WITH judged AS (
  SELECT *, from_json(slices, 'slices ARRAY<STRUCT<slice: STRING, images: BIGINT, champion: DOUBLE, challenger: DOUBLE,
      won: BIGINT, lost: BIGINT, p_value: DOUBLE, unit: DOUBLE>>, union STRUCT<images: BIGINT, champion: DOUBLE,
      challenger: DOUBLE, won: BIGINT, lost: BIGINT, p_value: DOUBLE, unit: DOUBLE>') AS said
  FROM IDENTIFIER(:decisions)
),
-- A comparison of which nothing can be read is still one row, without numbers.
parts AS (
  SELECT *, explode_outer(concat(
    coalesce(said.slices, array()),
    if(said.union IS NULL, array(), array(named_struct('slice', 'all', 'images', said.union.images,
      'champion', said.union.champion, 'challenger', said.union.challenger, 'won', said.union.won,
      'lost', said.union.lost, 'p_value', said.union.p_value, 'unit', said.union.unit)))
  )) AS part
  FROM judged
)
SELECT try_cast(decided_at AS TIMESTAMP) AS decided_at, champion, challenger, table AS judged_table,
  coalesce(promoted, FALSE) AS passed_gate, part.slice, part.images, part.champion AS champion_result,
  part.challenger AS challenger_result, part.unit, part.won, part.lost, part.p_value, reason, key
FROM parts
ORDER BY decided_at DESC, key, slice

-- What the project's compute cost by day, by Databricks' list prices; the machines themselves are on the cloud's own bill.
-- :usage    system.billing.usage
-- :prices   system.billing.list_prices
-- :project  value of the tag `project`
-- :days     how far back
WITH used AS (
  -- Corrections are rows of their own (record_type): a retraction has a negative quantity, so the sum is right.
  SELECT usage_date, coalesce(custom_tags['stage'], 'no stage') AS stage, billing_origin_product AS product, sku_name, cloud,
    usage_unit, usage_start_time, usage_quantity
  FROM IDENTIFIER(:usage)
  WHERE custom_tags['project'] = :project AND usage_date >= date_sub(current_date(), CAST(:days AS INT))
)
SELECT used.usage_date, used.stage, used.product, used.sku_name, prices.currency_code, used.usage_unit,
  sum(used.usage_quantity) AS quantity,
  sum(used.usage_quantity * prices.pricing.effective_list.default) AS list_cost,
  -- Without a price nothing is known of the cost, which is not 0.
  sum(if(prices.sku_name IS NULL, used.usage_quantity, 0)) AS quantity_without_price
FROM used LEFT JOIN IDENTIFIER(:prices) AS prices
  ON prices.sku_name = used.sku_name AND prices.cloud = used.cloud AND prices.usage_unit = used.usage_unit
  AND used.usage_start_time >= prices.price_start_time
  AND (prices.price_end_time IS NULL OR used.usage_start_time < prices.price_end_time)
GROUP BY used.usage_date, used.stage, used.product, used.sku_name, prices.currency_code, used.usage_unit
ORDER BY usage_date DESC, list_cost DESC, sku_name

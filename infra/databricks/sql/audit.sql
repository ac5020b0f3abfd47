-- Who changed what belongs to the project, and who was refused, newest first.
-- :audit    system.access.audit
-- :catalog  the stage's catalog
-- :schema   its schema
-- :days     how far back
WITH asked AS (
  SELECT event_time, user_identity.email AS who, source_ip_address, service_name, action_name, request_params,
    response.status_code AS status_code, response.error_message AS error_message, event_id,
    concat(:catalog, '.', :schema) AS place,
    -- Requests name what they are about in different parameters.
    coalesce(request_params['full_name_arg'], request_params['full_name'], request_params['securable_full_name'],
      concat_ws('.', request_params['catalog_name'], request_params['schema_name'], request_params['name'])) AS target
  FROM IDENTIFIER(:audit)
  WHERE event_date >= date_sub(current_date(), CAST(:days AS INT)) AND service_name = 'unityCatalog'
)
SELECT event_time, who, source_ip_address, action_name, target, request_params['alias'] AS alias,
  coalesce(request_params['version_num'], request_params['version']) AS version, status_code,
  status_code IN (401, 403) AS is_refused, error_message, event_id
FROM asked
-- Compared as text and not by LIKE, where the _ of a name would stand for any letter. Names have no capitals there.
WHERE (lower(target) = lower(place) OR startswith(lower(target), lower(concat(place, '.'))))
  AND (status_code IN (401, 403) OR action_name RLIKE '^(create|update|set|delete|finalize)')
ORDER BY event_time DESC, event_id

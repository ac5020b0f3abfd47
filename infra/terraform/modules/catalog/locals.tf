locals {
  # Readers read through the catalog only. Engineers see prod's files, but jobs alone write them.
  location_privileges = {
    (var.jobs_application_id)      = ["READ_FILES", "WRITE_FILES", "CREATE_EXTERNAL_TABLE", "CREATE_EXTERNAL_VOLUME"]
    (var.group_names["engineers"]) = ["READ_FILES"]
    (var.group_names["operators"]) = ["READ_FILES"]
  }

  catalog_privileges = {
    # Whoever applies this owns the catalog; the bundle may be deployed by another one, who owns the schema that it makes.
    (var.deployer_client_id) = ["USE_CATALOG", "USE_SCHEMA", "CREATE_SCHEMA"]
    (var.jobs_application_id) = [
      "USE_CATALOG", "USE_SCHEMA", "CREATE_SCHEMA", "CREATE_TABLE", "CREATE_VOLUME", "CREATE_MODEL", "SELECT", "MODIFY",
      "READ_VOLUME", "WRITE_VOLUME", "EXECUTE",
    ]
    (var.group_names["engineers"]) = ["USE_CATALOG", "USE_SCHEMA", "SELECT", "READ_VOLUME", "EXECUTE"]
    (var.group_names["operators"]) = ["USE_CATALOG", "USE_SCHEMA", "SELECT", "READ_VOLUME", "EXECUTE"]
    (var.group_names["readers"])   = ["USE_CATALOG", "USE_SCHEMA", "SELECT"]
  }
}

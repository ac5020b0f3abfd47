resource "databricks_storage_credential" "this" {
  name           = "${var.name}-storage"
  metastore_id   = var.metastore_id
  isolation_mode = "ISOLATION_MODE_ISOLATED" # a metastore serves a whole region: sit must not read prod with prod's key
  comment        = "Containers of raypipe"

  azure_managed_identity {
    access_connector_id = var.storage_connector_id
  }
}

resource "databricks_external_location" "this" {
  for_each = var.container_urls

  name            = "${var.name}-${each.key}"
  url             = each.value
  credential_name = databricks_storage_credential.this.name
  metastore_id    = var.metastore_id
  isolation_mode  = "ISOLATION_MODE_ISOLATED"
  comment         = "Container ${each.key} of raypipe"
}

resource "databricks_grants" "location" {
  for_each = databricks_external_location.this

  external_location = each.value.name

  dynamic "grant" {
    for_each = local.location_privileges

    content {
      principal  = grant.key
      privileges = grant.value
    }
  }
}

resource "databricks_catalog" "this" {
  name           = var.catalog_name
  metastore_id   = var.metastore_id
  storage_root   = databricks_external_location.this["models"].url
  isolation_mode = "ISOLATED" # seen from this stage's workspace only
  comment        = "Schemas, volumes and models of raypipe"

  lifecycle {
    prevent_destroy = true
  }
}

resource "databricks_grants" "catalog" {
  catalog = databricks_catalog.this.name

  dynamic "grant" {
    for_each = local.catalog_privileges

    content {
      principal  = grant.key
      privileges = grant.value
    }
  }
}

# What sends records to Azure Monitor from a cluster: a token of the telemetry connector, without a secret anywhere.
resource "databricks_credential" "telemetry" {
  name           = "${var.name}-telemetry"
  purpose        = "SERVICE"
  metastore_id   = var.metastore_id
  isolation_mode = "ISOLATION_MODE_ISOLATED"
  comment        = "Sends raypipe's records to Azure Monitor"

  azure_managed_identity {
    access_connector_id = var.telemetry_connector_id
  }
}

resource "databricks_grants" "telemetry" {
  credential = databricks_credential.telemetry.name

  grant {
    principal  = var.jobs_application_id
    privileges = ["ACCESS"]
  }

  grant {
    principal  = var.group_names["engineers"]
    privileges = ["ACCESS"]
  }
}

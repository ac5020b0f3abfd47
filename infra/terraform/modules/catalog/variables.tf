variable "catalog_name" {
  type        = string
  description = "Name of the catalog of this stage's schemas, volumes and registered models."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9_]{1,62}$", var.catalog_name))
    error_message = "catalog_name must be lower-case letters, digits and underscores, at most 63, letter first: it stands unquoted in SQL."
  }
}

variable "container_urls" {
  type        = map(string)
  description = "abfss:// address of each container: tables, models and logs."
  nullable    = false

  validation {
    condition     = alltrue([for url in values(var.container_urls) : startswith(url, "abfss://")]) && contains(keys(var.container_urls), "models")
    error_message = "container_urls must be abfss:// addresses, one of them under the key models."
  }
}

variable "deployer_client_id" {
  type        = string
  description = "Client id of the identity that deploys the bundle, which makes the schema."
  nullable    = false
}

variable "group_names" {
  type        = map(string)
  description = "Names of the groups engineers, operators and readers."
  nullable    = false
}

variable "jobs_application_id" {
  type        = string
  description = "Application id of the service principal that jobs run as."
  nullable    = false
}

variable "metastore_id" {
  type        = string
  description = "Id of the metastore that the catalog is made in."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of credentials and locations, which share one namespace in the metastore, for example raypipe-sit."
  nullable    = false
}

variable "storage_connector_id" {
  type        = string
  description = "Id of the access connector that reads and writes the containers."
  nullable    = false
}

variable "telemetry_connector_id" {
  type        = string
  description = "Id of the access connector that sends records to Azure Monitor."
  nullable    = false
}

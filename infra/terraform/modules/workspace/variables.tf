variable "cluster_subnet_association_ids" {
  type        = map(string)
  description = "Ids of the associations of the subnets host and container with their security group."
  nullable    = false
}

variable "cluster_subnet_names" {
  type        = map(string)
  description = "Names of the subnets host and container."
  nullable    = false
}

variable "container_ids" {
  type        = map(string)
  description = "Id of each container that Unity Catalog may read and write."
  nullable    = false
}

variable "location" {
  type        = string
  description = "Azure region of all resources."
  nullable    = false
}

variable "managed_resource_group_name" {
  type        = string
  description = "Resource group that Databricks makes for its virtual machines. It must not exist."
  nullable    = false
}

variable "metastore_id" {
  type        = string
  description = "Id of the region's Unity Catalog metastore."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of every resource's name, for example raypipe-sit."
  nullable    = false
}

variable "resource_group_name" {
  type        = string
  description = "Resource group that the workspace is made in."
  nullable    = false
}

variable "serverless" {
  type        = bool
  description = "Whether serverless compute (model serving, serverless SQL) gets private endpoints to the storage account."
  nullable    = false
}

variable "storage_account_id" {
  type        = string
  description = "Id of the storage account that serverless compute reaches."
  nullable    = false
}

variable "tags" {
  type        = map(string)
  description = "Tags of every resource."
  nullable    = false
}

variable "virtual_network_id" {
  type        = string
  description = "Id of the virtual network that the clusters run in."
  nullable    = false
}

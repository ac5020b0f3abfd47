variable "address_space" {
  type        = string
  description = "IPv4 range of the virtual network in CIDR form, /16 to /22: the four subnets are cut from it."
  nullable    = false

  validation {
    condition     = can(cidrnetmask(var.address_space)) && can(regex("/(1[6-9]|2[0-2])$", var.address_space))
    error_message = "address_space must be an IPv4 range from /16 to /22, for example 10.40.0.0/20."
  }
}

variable "location" {
  type        = string
  description = "Azure region of all resources."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of every resource's name, for example raypipe-sit."
  nullable    = false
}

variable "resource_group_name" {
  type        = string
  description = "Resource group that the network is made in."
  nullable    = false
}

variable "tags" {
  type        = map(string)
  description = "Tags of every resource."
  nullable    = false
}

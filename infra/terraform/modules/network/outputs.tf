output "virtual_network_id" {
  description = "Id of the virtual network that the workspace is injected into."
  value       = azurerm_virtual_network.this.id
}

output "cluster_subnet_names" {
  description = "Names of the subnets of the clusters: host and container."
  value       = { for kind, subnet in azurerm_subnet.cluster : kind => subnet.name }
}

output "cluster_subnet_association_ids" {
  description = "Ids of the associations of both subnets with their security group. A workspace asks for them, so it waits for them."
  value       = { for kind, association in azurerm_subnet_network_security_group_association.cluster : kind => association.id }
}

output "endpoint_subnet_id" {
  description = "Id of the subnet of the private endpoints."
  value       = azurerm_subnet.endpoints.id
}

output "private_dns_zone_ids" {
  description = "Id of the private DNS zone of each storage service: blob and dfs."
  value       = { for service, zone in azurerm_private_dns_zone.storage : service => zone.id }
}

output "outbound_ip" {
  description = "The one public address that clusters call out from, for allow-lists elsewhere."
  value       = azurerm_public_ip.nat.ip_address
}

output "bundle_variables" {
  description = "What the bundle asks for: terraform output -json bundle_variables."
  value       = module.stage.bundle_variables
}

output "platform" {
  description = "Policies, pools and the warehouse for people, and the sink's credential; the bundle makes those of its jobs itself."
  value       = module.stage.platform
}

output "sink" {
  description = "What the Azure Monitor sink is configured with."
  value       = module.stage.sink
}

output "outbound_ip" {
  description = "The one public address that clusters call out from, for allow-lists elsewhere."
  value       = module.stage.outbound_ip
}

output "probes" {
  description = "Jobs to run after an apply: they start one cluster of each kind."
  value       = module.stage.probes
}

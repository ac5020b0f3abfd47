locals {
  # Written from the sink's code, which sends exactly these columns (one source). Tables and the
  # collection rule are both made from it, so neither can differ from what is sent.
  streams = jsondecode(file("${path.module}/streams.json"))

  # The file has the names of the collection rule. The Tables API writes one of them otherwise.
  table_types = {
    datetime = "dateTime"
  }

  # What a stream of a collection rule can carry: no guid.
  stream_types = ["boolean", "datetime", "dynamic", "int", "long", "real", "string"]
  wrong_types = flatten([
    for table, stream in local.streams : [
      for column in stream.columns : "${table}.${column.name}: ${column.type}"
      if !contains(local.stream_types, column.type)
    ]
  ])

  audit_categories = toset([
    "accounts", "clusters", "instancePools", "jobs", "modelRegistry", "secrets", "serverlessRealTimeInference", "unityCatalog",
  ])

  notifications = {
    half     = { threshold = 50, type = "Actual" }
    most     = { threshold = 80, type = "Actual" }
    forecast = { threshold = 100, type = "Forecasted" }
  }
}

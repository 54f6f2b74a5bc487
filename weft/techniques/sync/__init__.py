"""Methods of synchronising islands (:class:`weft.sync.sync_method.SyncMethod`), which ``sync.update`` names."""

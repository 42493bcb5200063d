"""What runs inside each rank of the KV-transfer check; sent by value, NIXL and numpy only."""

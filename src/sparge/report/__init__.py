"""What every report shares: tables, JSON, and the machine a number was measured on."""

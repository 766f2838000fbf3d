-- Bodies of a file, one JSON object a line, sent in turn by wrk:
--   wrk -t2 -c32 -d30s --latency -s loadtest/wrk.lua http://127.0.0.1:8000 -- bodies.jsonl
local bodies = {}
local position = 0

function init(arguments)
  local name = arguments[1] or error("expected a file of request bodies after --")
  for line in assert(io.open(name)):lines() do
    bodies[#bodies + 1] = line
  end
  if #bodies == 0 then error(name .. ": no request bodies") end
  position = math.random(#bodies)
end

function request()
  position = position % #bodies + 1
  return wrk.format("POST", "/v1/recommend", {["Content-Type"] = "application/json"}, bodies[position])
end

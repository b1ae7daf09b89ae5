// Go's net/http: client URL TOKEN CONNECTIONS SECONDS
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const body = `{"model": "gpt-4o-mini", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}`

func call(url string, token string) string {
	request, _ := http.NewRequest("POST", url+"/openai/v1/chat/completions", strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		time.Sleep(300 * time.Millisecond)
		return "error"
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return "error"
	}
	return strconv.Itoa(response.StatusCode)
}

func main() {
	url, token := os.Args[1], os.Args[2]
	connections, _ := strconv.Atoi(os.Args[3])
	seconds, _ := strconv.ParseFloat(os.Args[4], 64)
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	http.DefaultTransport.(*http.Transport).MaxIdleConnsPerHost = connections
	var mutex sync.Mutex
	var group sync.WaitGroup
	seen := map[string]int{}
	for i := 0; i < connections; i++ { // Go before 1.22 has no range over an integer
		group.Add(1)
		go func() {
			defer group.Done()
			for time.Now().Before(end) {
				found := call(url, token)
				mutex.Lock()
				seen[found]++
				mutex.Unlock()
			}
		}()
	}
	group.Wait()
	text, _ := json.Marshal(seen)
	fmt.Println(string(text))
}
